"""The cluster page during an outage: what is wrong stands first, and nothing that is not known looks like a number."""

from __future__ import annotations

from tests.rooms.web.pages import opened_town


def test_a_broker_that_does_not_answer_is_said_in_red_and_its_share_is_unknown() -> None:
    with opened_town(2) as (browser, town):
        browser.run(town.create("/default/here", on=1))
        browser.run(town.create("/default/there", on=2))
        browser.sample()
        healthy = browser.until("/cluster", "Topics 2")
        assert "does not answer" not in healthy.text and "nobody lags" in healthy.text
        silent = town.node(2)
        browser.run(silent.doors._admin.stop(None))
        browser.run(silent.doors._metrics.close())
        browser.site.gateway.forget()
        browser.sample()
        page = browser.until("/cluster", "does not answer since")
        assert 'class="banner bad" role="alert"' in page.body
        assert page.body.index('class="banner bad"') < page.body.index("<h1>")
        assert silent.doors.client_addr in page.text and "1 topic has no server" in page.text
        assert "Brokers 1 of 2" in page.text and "1 without a server" in page.text
        assert "nobody lags" not in page.text and "Lag unknown at least 0 messages" in page.text
        assert "Every subscription has caught up" not in page.text
        assert "docs/runbooks/DanubeBrokerDown.md" in page.text
