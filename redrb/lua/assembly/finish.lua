-- Remove the parts of a group that is not put: they are dropped, or moved to the dead letters.
-- KEYS[1] stream
-- ARGV    the call `FinishParts` of redrb/stream/assembly/calls.py; the encoded samples of all parts,
--         '' if they cannot be encoded as a group
-- Returns its reply. Repeated, it does nothing a second time.
--@include task facts waking parts permissions

check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
if not rules().exists or not claimed_record(ask.claim) then
  return cmsgpack.pack('ended')
end
if ask.claim.outcome == 'dead' then
  redis.call('XADD', key('dead'), '*', 'seq', '0', 'group', '', 'reason', ask.reason,
    'exception', ask.cause.exception, 'message', ask.cause.text, 'consumer', ask.consumer,
    'failed_deliveries', '0', 'deliveries', '0', 'incarnation', rules().incarnation, 'g', ARGV[2])
  --@include dead_letters
  trim_letters()
end
local record = end_claimed(ask.claim, '')
if record.right then
  --@include held_rights
  return_right(record.series, record.right)
  wake_makers()
end
return cmsgpack.pack('done')
