"""Text becomes files of token ids, and those become windows in an order."""
