"""Studies: from tables of many runs to an interval, a sentence computed from it, and a page."""
