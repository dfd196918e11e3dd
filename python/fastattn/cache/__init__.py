"""Key-value caches, contiguous and in pages."""
