"""Commands of ``flash-rt``, one file each."""
