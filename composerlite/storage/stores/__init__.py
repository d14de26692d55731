"""Object stores: one module for each service or protocol, and the shared modules ``base`` and ``web``. SDKs are
optional libraries, so the module of a service is imported when a store with the scheme of the service is opened.
"""
