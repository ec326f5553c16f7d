"""What runs in a process or a container: thin, each job calls the library and ends with an exit code."""
