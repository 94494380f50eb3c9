-- End a lease, or groups of it.
-- KEYS[1] stream
-- ARGV    the call `Finish` of redrb/stream/take/calls.py
-- Returns its reply. Repeated, it changes nothing more and returns 'ok'.
--@include task facts pools pending

begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local group, slot, token, outcome, seqs = ask.group, ask.slot, ask.token, ask.outcome, ask.seqs
local why = {text = ask.reason.text, exception = ask.reason.exception, consumer = ask.consumer}
local held = redis.call('HGET', key('leases', group), slot)
if held == token .. ' ended' or ask.ends and held == token .. ' requeued ended' then
  return cmsgpack.pack('ok')
elseif held ~= token and held ~= token .. ' part' then
  return cmsgpack.pack('lost')
end

local rule = rules()
if outcome ~= 'ack' and outcome ~= 'expire' and held == token then -- others may have these groups soon
  redis.call('HSET', key('leases', group), slot, token .. ' part')
end
if outcome == 'ack' or outcome == 'expire' then
  --@include finishing
  end_held(group, slot, seqs, outcome, ask.samples, held == token)
elseif outcome == 'reject' then
  --@include rejections
  reject_held(group, slot, seqs, why)
else
  --@include leases
  return_held(group, held_by(group, slot, seqs), outcome == 'fail' and why, true)
end
if ask.ends then
  local requeued = outcome == 'release' or outcome == 'fail'
  redis.call('HSET', key('leases', group), slot, token .. (requeued and ' requeued ended' or ' ended'))
end
if rule.groups_per_version or has_entered() or redis.call('EXISTS', key('queue', '#room')) == 1 then
  --@include waking
  wake_room()
  wake_entered()
end
return cmsgpack.pack('ok')
