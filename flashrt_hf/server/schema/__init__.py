"""Requests and answers of the HTTP interface, one file an endpoint."""
