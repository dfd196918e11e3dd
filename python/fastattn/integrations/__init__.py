"""The doors for code that was written against other packages. Each imports its package only when it is imported."""
