"""Prepares the other libraries (peers) that are measured along with fastattn."""
