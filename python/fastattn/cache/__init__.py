"""Key-value caches, contiguous and paged."""
