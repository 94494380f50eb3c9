-- Remove the parts of a group that is not put: they are dropped, or moved to the dead letters.
-- KEYS[1] stream
-- ARGV    claim, reason, exception, message, consumer, group
--         claim: as in include/parts.lua; with the outcome 'dead' they become a dead letter, which has the
--         other arguments; exception, message: '' for none; group: the encoded samples of all parts, '' if
--         they cannot be encoded as a group
-- Returns {'done'} | {'ended'}: they have ended before, or there are more of them now
--       Repeated, it does nothing a second time.
--@include task facts waking parts permissions

check_permissions(KEYS[1])
begin_writing()
if not rules().exists or refused_claim(ARGV[1]) then
  return {'ended'}
end
if cmsgpack.unpack(ARGV[1])[3] == 'dead' then
  redis.call('XADD', key('dead'), '*', 'seq', '0', 'group', '', 'reason', ARGV[2], 'exception', ARGV[3],
    'message', ARGV[4], 'consumer', ARGV[5], 'failed_deliveries', '0', 'deliveries', '0',
    'incarnation', rules().incarnation, 'g', ARGV[6])
  --@include dead_letters
  trim_letters()
end
local record = end_claimed(ARGV[1], '')
if record.right then
  --@include held_rights
  return_right(record.series, record.right)
  wake_makers()
end
return {'done'}
