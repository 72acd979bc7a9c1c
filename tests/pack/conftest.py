"""The servers that tests of packing from and to stores ask."""

from store_servers import range_server, s3, s3_server

__all__ = ["range_server", "s3", "s3_server"]
