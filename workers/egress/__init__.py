"""The egress proxy: the only way out for sandboxes whose tenant class has network. It applies the tenant's rules
(docs/images.md).
"""
