"""Fields and strategies that laws of several chapters share."""
