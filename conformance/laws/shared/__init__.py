"""What laws of several chapters share."""
