"""Advantage: rewards of leaves become one number per trained transition, with every part kept for the audit."""
