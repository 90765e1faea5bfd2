"""Access to the web: requests to checked addresses, bodies of limited size, conversion of pages to text, and search
services.
"""
