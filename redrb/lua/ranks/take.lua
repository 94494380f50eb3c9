-- A rank asks for its part of a step. When all ranks have asked for the step, one of them forms it: it
-- leases the batch with take/take.lua and deals it with ranks/assign.lua. Payload is then read with
-- XREADGROUP GROUP group ranks/<step>.<rank> STREAMS stream 0.
-- KEYS[1] stream
-- ARGV    the call `AskPart` of redrb/stream/ranks/calls.py
-- Returns its reply
--@include task clock facts pending takeover ranks attempts steps
--@before ranks/assign ranks/end ranks/finish

local FORMING_MS = 3000 -- a rank that forms a step and is silent for so long is replaced by another
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local group, consumer, spec = ask.group, ask.consumer, ask.spec
local rank, world, step = ask.place.rank, ask.place.world_size, ask.place.step
local step_name = string.format('%.0f', step)
local ranks, parts = key('ranks', group), key('rank_parts', group)
if not rules().exists or rules().incarnation ~= ask.incarnation then
  return cmsgpack.pack({outcome = 'gone'})
end
if not ask.joined then -- the rank starts
  --@include permissions
  check_permissions(stream)
end
do
  --@include membership
  if not join(group) then
    return cmsgpack.pack({outcome = 'more'})
  end
end
local now = set_clock(ask.lease_ms)
if beat(group, consumer, ask.lease_ms, now) > 0 then
  --@include waking
  wake_room(now)
  wake_entered(now)
end
if redis.call('EXISTS', key('returning', group)) == 1 then -- slots that new parts may need
  return cmsgpack.pack({outcome = 'more'})
end

-- ranks of another number, or with other requests, end when all their processes are dead
local function amount(text)
  return string.match(text, '^%S+')
end
local state, none = numbers(ranks, 'world', 'first', 'formed')
check_ranks(group)
local formed_as = not none and redis.call('HGET', parts, step_name)
if not none and (state[1] ~= world or formed_as and amount(formed_as) ~= amount(spec)) then
  local living = living_ranks(group, consumer, now)
  if #living > 0 then
    return cmsgpack.pack({outcome = 'held', number = state[1], ranks = living})
  end
  end_ranks(group)
  none = true
end
if none and redis.call('ZSCORE', key('consumers', group), RANKS) then -- leases of earlier ranks
  return cmsgpack.pack({outcome = 'more'})
elseif none then
  local leased = count_leased(group)
  if leased > 0 then
    return cmsgpack.pack({outcome = 'leased', number = leased})
  end
  redis.call('HSET', ranks, 'world', world, 'first', step_name, 'attempt', '1',
    'formed', string.format('%.0f', step - 1))
  redis.call('ZADD', key('consumers', group), '+inf', RANKS)
  state = {world, step, step - 1}
end
local holder = redis.call('HGET', ranks, 'holder:' .. rank)
if holder ~= consumer then
  if holder and ask.joined then
    return cmsgpack.pack({outcome = 'replaced'})
  end
  redis.call('HSET', ranks, 'holder:' .. rank, consumer, 'seen:' .. rank, number(ranks, 'losses'))
  local _, dead = living_ranks(group, consumer, now)
  forget_ranks(group, dead) -- most likely all ranks are starting again
end
if not ask.joined and step <= state[3] + 1 then -- its checkpoint holds the earlier steps
  -- bound: unacknowledged steps, 64 at most (MOST_STEPS)
  for earlier = state[2], math.min(step - 1, state[3]) do
    if mark_acked(group, earlier, rank, 0) then
      return cmsgpack.pack({outcome = 'more'})
    end
  end
  --@include waking
  wake_room(now)
end
local first, formed = unpack((numbers(ranks, 'first', 'formed')))

-- a step that is formed already
if step < first or step <= formed and redis.call('HEXISTS', parts, step_name) == 0 then
  return cmsgpack.pack({outcome = 'done', number = first})
elseif step <= formed and is_ending(group, step) then
  mark_acked(group, step, rank, 0)
  return cmsgpack.pack({outcome = 'more'})
elseif step <= formed then
  local name = part_of(step, rank)
  local given = redis.call('HGET', parts, name .. ':given')
  local living = living_ranks(group, consumer, now)
  local elsewhere = given and given ~= consumer and is_given(group, step, living)
  if not given or given == consumer or not fail_part(group, step, rank, {consumer = given or consumer}) then
    local seqs = words(redis.call('HGET', parts, name))
    if #seqs > 0 then -- else all its groups were rejected, and the part is done
      redis.call('HSET', parts, name .. ':given', consumer)
      redis.call('HDEL', parts, name .. ':acked')
    end
    local weights = redis.call('HGET', parts, name .. ':weights')
    return cmsgpack.pack({outcome = 'part', ids = seqs,
      weights = weights and cmsgpack.unpack(weights) or nil})
  end
  --@include waking
  wake_room(now)
  wake_entered(now)
  if elsewhere then -- ranks that have their part learn it when they acknowledge
    return cmsgpack.pack({outcome = 'ended', reason = 'anew'})
  elseif redis.call('EXISTS', key('returning', group)) == 1 then
    return cmsgpack.pack({outcome = 'more'})
  end
elseif step > formed + 1 then
  return cmsgpack.pack({outcome = 'early', number = formed + 1})
elseif step >= first + ask.most_steps then
  return cmsgpack.pack({outcome = 'unacked', number = first})
end

-- the next step: all ranks have to ask for it
local attempt = number(ranks, 'attempt')
local late = lost_before(group, rank)
if ask.attempt > 0 and ask.attempt <= number(ranks, 'ended') then
  local reason, missing, last_look = unpack(redis.call('HMGET', ranks, 'reason', 'missing', 'last_look'))
  return cmsgpack.pack({outcome = 'ended', reason = reason, ranks = words(missing),
    last_look = last_look and cmsgpack.unpack(last_look) or nil})
end
if #late > 0 then
  return cmsgpack.pack({outcome = 'ended', reason = 'lost', ranks = late})
end
local requests = key('rank_requests', group)
local at, theirs = string.match(redis.call('HGET', ranks, 'spec') or '', '^(%d+) (.*)$')
if tonumber(at or '0') == attempt and theirs ~= spec then
  for _, other in ipairs((living_ranks(group, consumer, now))) do
    if tonumber(redis.call('ZSCORE', requests, other) or '0') == attempt then
      return cmsgpack.pack({outcome = 'differs', spec = theirs})
    end
  end
  redis.call('DEL', requests) -- all ranks that asked for that are dead
end
redis.call('HSET', ranks, 'spec', string.format('%.0f %s', attempt, spec))
redis.call('ZADD', requests, attempt, rank)
local complete, again = redis.call('ZCOUNT', requests, attempt, attempt) == world, ask.attempt == attempt
if complete or again or world <= 16 then -- among many ranks, not each looks at all others
  local _, dead = living_ranks(group, consumer, now)
  if #dead > 0 then
    redis.call('HSET', ranks, 'seen:' .. rank, redis.call('HINCRBY', ranks, 'losses', 1),
      'lost', table.concat(dead, ' '))
    end_attempt(group, 'lost', dead)
    forget_ranks(group, dead)
    return cmsgpack.pack({outcome = 'ended', reason = 'lost', ranks = dead})
  end
end
if not complete then
  return cmsgpack.pack({outcome = 'wait', number = attempt,
    ranks = again and missing_in(group, attempt) or {}})
end
local forming, deadline = string.match(redis.call('HGET', ranks, 'forming') or '', '^(%d+) (%d+)$')
if ask.last or not forming or tonumber(forming) == rank or tonumber(deadline) < now then
  redis.call('HSET', ranks, 'forming', string.format('%.0f %.0f', rank, now + FORMING_MS))
  return cmsgpack.pack({outcome = 'form', number = attempt})
end
return cmsgpack.pack({outcome = 'wait', number = attempt})
