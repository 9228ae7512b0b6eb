"""Whatever stands on a topic that we read: it is taken as valid or kept as a dead letter, and every service goes on under its own user."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hostile_campaign import TOPICS_UNDER_FIRE, run_campaign
from secure_access import granted_access
from secure_services import everything

pytestmark = [pytest.mark.stack, pytest.mark.slow]


async def test_every_record_is_valid_or_dead_lettered_and_no_service_falls_over(stack: Any, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    home = tmp_path / "home"
    home.mkdir()
    async with granted_access(tmp_path, ["team-a"]) as granted:
        async with everything(stack, granted, home, ["team-a"], ["default"]) as http:
            outcomes = await run_campaign(granted.broker.settings(), http, count=300, seed=1)
        assert {outcome.topic for outcome in outcomes} == set(TOPICS_UNDER_FIRE)
        for outcome in outcomes:
            assert outcome.sent >= 300, outcome
            assert outcome.accepted + outcome.dead == outcome.sent
            assert outcome.accepted > 30, outcome
            assert outcome.dead > 30, outcome
            assert outcome.wrong == (), outcome
        ours = {role.principal for role in granted.roles}
        assert not [denial for denial in granted.broker.denials() if denial.user in ours]
