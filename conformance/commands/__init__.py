"""What a person asks for: one module for each verb of the command line."""
