"""The web admin: pages and JSON for a browser and for tools, over the brokers' admin services and metrics.

app.py        what answers which path, who may ask, what nobody may do
pages.py …    one page each: asks, makes a view, fills a template (topic_pages, message_pages, letter_pages)
actions.py …  one form each (settings.py: what can be set)
gateway.py    one long-lived channel to the cluster, whichever broker answers
sampler.py    scrapes every broker every few seconds into
samples.py    counters in, rates and series out: bounded, without a clock of its own
"""
