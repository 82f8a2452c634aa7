"""The server: OpenAI's API and the verbs of a state over HTTP, beside an engine in a process of its own."""
