"""Alias of an import path that existing programs use; no logic."""

from monarch.actor import Endpoint, EndpointProperty, Extent, NotAnEndpoint, endpoint
from monarch.actor._endpoint import Propagator, Selection
