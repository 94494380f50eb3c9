"""A Redis whose disk is full takes no writes: an outage, after which all goes on."""

import threading

import pytest

import redrb
from redrb import ExperienceStream
from redrb.errors import StoreUnavailable
from redrb.stream.sending import ExperienceSender
from tests.audit import audit
from tests.disks import fill, small_disk
from tests.samples import numbered


def test_a_full_disk_of_redis_is_an_outage_for_senders_and_trainers(tmp_path, own_server):
    with small_disk(tmp_path / "disk", "2m") as disk:
        server = own_server("--appendonly", "yes", "--dir", str(disk))
        with (
            redrb.connect(server.url, retry_s=1) as client,
            redrb.connect(server.url, retry_s=60) as patient,
            ExperienceStream(client, "math") as stream,
            ExperienceStream(patient, "math") as later,
        ):
            stream.put_many([[numbered(n)] for n in range(4)])
            lease = stream.take(2, timeout=5)
            filler = fill(disk)
            with pytest.raises(StoreUnavailable, match="disk is full or not writable"):
                while True:  # until the server has noticed
                    stream.put([numbered(4)])
            with pytest.raises(StoreUnavailable, match="Make room on the disk"):
                stream.take(2, timeout=5)
            with pytest.raises(StoreUnavailable, match="Make room on the disk"):
                lease.ack()
            room = threading.Timer(1.0, filler.unlink)
            room.start()
            with ExperienceSender([later]) as sender:
                sender.send([numbered(99)])
                sender.flush(timeout=60)
            room.join()
            lease.ack()
            stream.take(len(stream), timeout=5).ack()
            assert stream.stats().ledger.balanced
            audit(stream)
