"""The audit room: a stored round as joined tables, as a page, and in sentences. Reads files, trains nothing."""
