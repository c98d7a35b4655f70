"""What protects the connections between our processes, and those to clients. Imports nothing of ours."""
