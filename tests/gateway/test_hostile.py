"""Bodies, queries and paths that nobody should send: whatever comes, the answer is no 5xx; imports hypothesis."""

import asyncio
import json
import string
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fumehood.protocol.responses import CreateResponse
from tests.support.engines import Engine
from tests.support.gateway import Answer, Served, serving_gateway
