"""The report: evaluations and runs in (files only), tables, figures and one self-contained page out."""
