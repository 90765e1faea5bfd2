"""Invoices: lines, discounts and tax."""
