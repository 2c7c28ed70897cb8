"""The web admin: pages and JSON for a browser and for tools, over the brokers' admin services and metrics.

app.py        what answers which path, who may ask, what is never done
pages.py …    one page each: asks, makes a view, fills a template (topic_pages, message_pages, letter_pages)
actions.py …  one form each (settings.py: what can be set)

Brokers are asked through `pydanube.admin`: its calls and gateway, and its samples of their metrics.
"""
