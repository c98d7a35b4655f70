"""The HTTP application itself, before a fleet without workers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import httpx

from router.admission import Admission, AdmissionRules, Capacity
from router.doorkeeper import Doorkeeper
from router.failover import RetryLimits
from router.fleet import Fleet, LinkSettings
from router.generation_service import GenerationService
from router.http_door import make_http_door
from router.metrics import RouterMetrics
from router.model_card import ModelCard
from router.placement import PlacementRules
from router.placer import Placer
from router.tokenizer import Tokenizer
from router.tool_style import HERMES
from security.channel_security import Plaintext


@asynccontextmanager
async def lonely_door(model: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Its client. What is sound finds no worker: 503."""
    tokenizer = Tokenizer.load(model)
    fleet = Fleet(LinkSettings("tiny", 1.0, Plaintext()))
    card = ModelCard.read(model, "tiny")
    metrics = RouterMetrics()
    placer = Placer(fleet, PlacementRules(), metrics, Random(0))
    admission = Admission(AdmissionRules(), lambda: Capacity(0, 0.0, 0), metrics.refused)
    service = GenerationService(card, tokenizer, fleet, metrics, placer, admission, RetryLimits(1, 0))
    transport = httpx.ASGITransport(app=make_http_door(service, HERMES, Doorkeeper(None)))
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        yield client
    tokenizer.close()
