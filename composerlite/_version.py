"""The version of composerlite: read where it is built, and by what is run from a checkout, without an installation."""

VERSION = "0.1.0"
