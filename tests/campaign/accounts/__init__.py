"""Commands of one account on files, folders and settings that belong to another account."""
