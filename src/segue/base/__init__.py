"""Words every layer shares: parameters, scopes, configuration, time, errors."""
