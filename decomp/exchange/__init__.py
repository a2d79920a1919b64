"""Factors in other layouts: read, migrate, export."""
