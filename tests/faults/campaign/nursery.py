"""Loaded once by the process that all others are forked from: what daemons, engines and checks of an index need."""

import forebay.clients
import forebay.server.daemon
import forebay.tiers.ssd.recovery
import tests.daemon_process
import tests.faults.guards

LOADED = (forebay.clients, forebay.server.daemon, forebay.tiers.ssd.recovery, tests.daemon_process, tests.faults.guards)
