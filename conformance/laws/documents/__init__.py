"""What the documents' own examples left undone."""
