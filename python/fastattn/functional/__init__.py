"""Holds the public functions: each checks its arguments, asks the dispatcher for a backend, and runs the call there."""
