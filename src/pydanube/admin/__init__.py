"""What operators ask and order, in values: with the client, the layer through which `cli` and `web` reach brokers.

calls.py     the admin services: a function per call, from arguments to a `GrpcCall` that any connection carries out
values.py    what such calls answer with
gateway.py   a cluster behind one address: calls go to whichever broker answers, common questions are cached
sampler.py   scrapes every broker every few seconds into samples.py: counters in, rates and series out
redrive.py   dead letters back to their topics, each once; letters.py reads them, ledger.py says which are done
survey.py    what of a dead-letter topic is open
"""
