"""The public functions: each checks its arguments, asks the dispatcher, and has the call carried out."""
