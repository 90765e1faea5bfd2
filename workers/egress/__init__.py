"""The egress proxy: the only network access of sandboxes whose tenant class has network. The proxy applies the
tenant's rules (docs/images.md).
"""
