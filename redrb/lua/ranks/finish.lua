-- A rank ends its part of a step, or groups of it. The step is acknowledged when all ranks have
-- acknowledged it: until then, ranks that start again find every part.
-- KEYS[1] stream
-- ARGV    the call `FinishPart` of redrb/stream/ranks/calls.py
-- Returns its reply. Repeated, it changes nothing more, and nothing is lost.
--@include task waking ranks finishing steps rejections

begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local group, consumer, rank, step, outcome = ask.group, ask.consumer, ask.rank, ask.step, ask.outcome
local ranks, parts = key('ranks', group), key('rank_parts', group)
local why = {text = ask.reason.text, exception = ask.reason.exception, consumer = consumer}
local holder = redis.call('HGET', ranks, 'holder:' .. rank)
if holder and holder ~= consumer then
  return cmsgpack.pack({loss = 'replaced'})
end
local state = numbers(ranks, 'first', 'formed')
check_ranks(group)
if outcome == 'leave' then
  for each = state[1], state[2] do -- bound: unacknowledged steps, 64 at most (MOST_STEPS)
    redis.call('HDEL', parts, part_of(each, rank) .. ':given')
  end
  return cmsgpack.pack({loss = ''})
end
local name, slot = part_of(step, rank), slot_of(step, rank)
if step > state[2] then
  return cmsgpack.pack({loss = holder and 'anew' or 'ended'})
elseif step < state[1] or redis.call('HEXISTS', parts, string.format('%.0f', step)) == 0 then
  return cmsgpack.pack({loss = holder and '' or 'ended'}) -- all have acknowledged it
end
local given = redis.call('HGET', parts, name .. ':given')
if not holder and given and given ~= consumer then -- a process that replaced this one, and died
  return cmsgpack.pack({loss = 'replaced'})
end

local held, mine, left, more = {}, {}, {}, false
if #ask.seqs > 0 or outcome == 'reject' or outcome == 'expire' then
  for _, seq in ipairs(words(redis.call('HGET', parts, name))) do
    held[seq] = true
  end
end
for _, seq in ipairs(ask.seqs) do
  if held[seq] or is_ending(group, step) then
    mine[#mine + 1] = seq
  elseif outcome ~= 'reject' and outcome ~= 'expire' then
    return cmsgpack.pack({loss = 'anew'})
  end
end
if outcome == 'release' then
  redis.call('HDEL', parts, name .. ':given')
elseif outcome == 'fail' then
  if redis.call('HDEL', parts, name .. ':given') == 1 then
    fail_part(group, step, rank, why)
  end
elseif outcome == 'ack' then
  more = mark_acked(group, step, rank, ask.samples)
else
  if outcome == 'reject' then
    reject_held(group, slot, mine, why)
  else
    end_held(group, slot, mine, outcome, 0)
  end
  for _, seq in ipairs(mine) do
    held[seq] = nil
  end
  for _, seq in ipairs(words(redis.call('HGET', parts, name))) do
    if held[seq] then
      left[#left + 1] = seq
    end
  end
  redis.call('HSET', parts, name, table.concat(left, ' '))
  if #left == 0 then -- nothing is left to be acknowledged
    more = mark_acked(group, step, rank, 0)
  end
end
if not more and is_ending(group, state[1]) and state[1] ~= step then -- its last rank has died meanwhile
  more = mark_acked(group, state[1], rank, 0)
end
wake_room()
wake_entered()
return cmsgpack.pack({more = more})
