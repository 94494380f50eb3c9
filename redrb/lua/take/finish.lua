-- End a lease, or groups of it.
-- KEYS[1] stream
-- ARGV    group, consumer, slot, token, outcome, reason, exception, samples, ends, seq ...
--         outcome: ack | expire (too stale) | release (requeue) | fail (requeue, counts as a failed
--         delivery) | reject (to the dead-letter stream)
--         reason, exception: of reject and fail, for dead letters: why, or an exception's message and class
--         samples: of ack, number of samples trained
--         ends: 1 when nothing of the lease is left
-- Returns {'ok', entries ended} | {'lost'}: the lease was taken from its consumer, and nothing is ended
--         Repeated, it changes nothing more and returns {'ok', 0}.
--@include task facts pools pending

begin_writing()
local group, consumer, slot, token = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local outcome, why = ARGV[5], {text = ARGV[6], exception = ARGV[7], consumer = consumer}
local held = redis.call('HGET', key('leases', group), slot)
if held == token .. ' ended' then
  return {'ok', 0}
elseif held ~= token and held ~= token .. ' part' then
  return {'lost'}
end

local seqs, rule = {}, rules()
local ended
for i = 10, #ARGV do
  seqs[i - 9] = ARGV[i] -- as text: formatting a number costs ten times as much
end

if outcome ~= 'ack' and outcome ~= 'expire' and held == token then -- others may have these groups soon
  redis.call('HSET', key('leases', group), slot, token .. ' part')
end
if outcome == 'ack' or outcome == 'expire' then
  --@include endings
  ended = end_held(group, slot, seqs, outcome, tonumber(ARGV[8]), held == token)
elseif outcome == 'reject' then
  --@include rejections
  ended = reject_held(group, slot, seqs, why)
else
  --@include leases
  ended = return_held(group, held_by(group, slot, seqs), outcome == 'fail' and why, true)
end
if ARGV[9] == '1' then
  redis.call('HSET', key('leases', group), slot, token .. ' ended')
end
if rule.rate or rule.groups_per_version or has_entered()
  or redis.call('EXISTS', key('queue', '#room')) == 1 then
  --@include waking
  wake_room()
  wake_returned(group)
end
return {'ok', ended}
