"""What users do, played against a server: workloads, the client that plays them, and what is measured."""
