"""What operators ask and order, in values: the layer that `cli` and `web` reach brokers through, beside the client.

calls       the admin services: a function per call, from arguments to a `Call` that any connection carries out
values      what such calls answer with
gateway     a cluster behind one address: calls go to whichever broker answers, common questions are cached
samples     metrics of brokers as rates and series; sampler.py collects them
redrive     dead letters back to their topics, each once; letters.py, ledger.py
"""
