"""Text becomes files of token ids, and those become sequences in an order."""
