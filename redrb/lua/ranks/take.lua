-- A rank asks for its part of a step. When all ranks have asked for the step, one of them forms it: it
-- leases the batch with take/take.lua and deals it with ranks/assign.lua. Payload is then read with
-- XREADGROUP GROUP group ranks/<step>.<rank> STREAMS stream 0.
-- KEYS[1] stream
-- ARGV    group, consumer, rank, world, step, spec, attempt, joined, last, lease_ms, most,
--         incarnation
--         spec: the request, the same for all ranks; its first word is the number of groups
--         attempt: attempt in which the rank asked before, or 0
--         joined: 1: the consumer has been this rank; 0: it starts, and has trained all earlier steps
--         last: 1 when the rank's time is up
--         most: number of formed steps that may be unacknowledged
--         incarnation: of the task that the client has opened
-- Returns {'part', {seq ...}, weights}
--       | {'form', attempt}: this rank forms the step
--       | {'wait', attempt, {rank that has not asked yet ...}}
--       | {'ended', reason, counts, {missing rank ...}}: no rank gets a part in this attempt
--         reason: short (too few groups in time) | lost (ranks died) | anew (the step is formed again)
--       | {'done', next step}: all ranks have acknowledged the step
--       | {'early', next step}: an earlier step is not formed yet
--       | {'unacked', first step}: too many steps are unacknowledged
--       | {'differs', spec of the other ranks} | {'replaced'}: another process is this rank
--       | {'held', world, {living rank ...}}: other ranks take from this consumer group
--       | {'leased', entries}: other consumers lease entries of this consumer group
--       | {'gone'}: there is no such task, or it was created anew
--       | {'more'}: the consumer group is joining, run it again
--@include task clock facts pending takeover ranks attempts steps
--@before ranks/assign ranks/end ranks/finish

local FORMING_MS = 3000 -- a rank that forms a step and is silent for so long is replaced by another
begin_writing()
local group, consumer, rank, world = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local step, spec, before, lease_ms = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[10])
local ranks, parts = key('ranks', group), key('rank_parts', group)
if not rules().exists or rules().incarnation ~= ARGV[12] then
  return {'gone'}
end
if ARGV[8] == '0' then -- the rank starts
  --@include permissions
  check_permissions(stream)
end
do
  --@include membership
  if not join(group) then
    return {'more'}
  end
end
local now = set_clock(lease_ms)
if beat(group, consumer, lease_ms, now) > 0 then
  --@include waking
  wake_room(now)
  wake_returned(group, now)
end
if redis.call('EXISTS', key('returning', group)) == 1 then -- slots that new parts may need
  return {'more'}
end

-- ranks of another number, or with other requests, end when all their processes are dead
local function amount(text)
  return string.match(text, '^%S+')
end
local state, none = numbers(ranks, 'world', 'first', 'formed')
check_ranks(group)
local formed_as = not none and redis.call('HGET', parts, ARGV[5])
if not none and (state[1] ~= world or formed_as and amount(formed_as) ~= amount(spec)) then
  local living = living_ranks(group, consumer, now)
  if #living > 0 then
    return {'held', state[1], living}
  end
  end_ranks(group)
  none = true
end
if none and redis.call('ZSCORE', key('consumers', group), RANKS) then -- leases of earlier ranks
  return {'more'}
elseif none then
  local leased = count_leased(group)
  if leased > 0 then
    return {'leased', leased}
  end
  redis.call('HSET', ranks, 'world', ARGV[4], 'first', ARGV[5], 'attempt', '1',
    'formed', string.format('%.0f', step - 1))
  redis.call('ZADD', key('consumers', group), '+inf', RANKS)
  state = {world, step, step - 1}
end
local holder = redis.call('HGET', ranks, 'holder:' .. ARGV[3])
if holder ~= consumer then
  if holder and ARGV[8] == '1' then
    return {'replaced'}
  end
  redis.call('HSET', ranks, 'holder:' .. ARGV[3], consumer, 'seen:' .. ARGV[3], number(ranks, 'losses'))
  local _, dead = living_ranks(group, consumer, now)
  forget_ranks(group, dead) -- most likely all ranks are starting again
end
if ARGV[8] == '0' and step <= state[3] + 1 then -- its checkpoint holds the earlier steps
  -- bound: unacknowledged steps, 64 at most (MOST_STEPS)
  for earlier = state[2], math.min(step - 1, state[3]) do
    if mark_acked(group, earlier, rank, '0') then
      return {'more'}
    end
  end
  --@include waking
  wake_room(now)
end
local first, formed = unpack((numbers(ranks, 'first', 'formed')))

-- a step that is formed already
if step < first or step <= formed and redis.call('HEXISTS', parts, ARGV[5]) == 0 then
  return {'done', first}
elseif step <= formed and is_ending(group, step) then
  mark_acked(group, step, rank, '0')
  return {'more'}
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
    return {'part', seqs, redis.call('HGET', parts, name .. ':weights') or ''}
  end
  --@include waking
  wake_room(now)
  wake_returned(group, now)
  if elsewhere then -- ranks that have their part learn it when they acknowledge
    return {'ended', 'anew', '', {}}
  elseif redis.call('EXISTS', key('returning', group)) == 1 then
    return {'more'}
  end
elseif step > formed + 1 then
  return {'early', formed + 1}
elseif step >= first + tonumber(ARGV[11]) then
  return {'unacked', first}
end

-- the next step: all ranks have to ask for it
local attempt = number(ranks, 'attempt')
local late = lost_before(group, rank)
if before > 0 and before <= number(ranks, 'ended') then
  local ended = redis.call('HMGET', ranks, 'reason', 'counts', 'missing')
  return {'ended', ended[1], ended[2], words(ended[3])}
end
if #late > 0 then
  return {'ended', 'lost', '', late}
end
local requests = key('rank_requests', group)
local at, theirs = string.match(redis.call('HGET', ranks, 'spec') or '', '^(%d+) (.*)$')
if tonumber(at or '0') == attempt and theirs ~= spec then
  for _, other in ipairs((living_ranks(group, consumer, now))) do
    if tonumber(redis.call('ZSCORE', requests, other) or '0') == attempt then
      return {'differs', theirs}
    end
  end
  redis.call('DEL', requests) -- all ranks that asked for that are dead
end
redis.call('HSET', ranks, 'spec', string.format('%.0f %s', attempt, spec))
redis.call('ZADD', requests, attempt, rank)
local complete, again = redis.call('ZCOUNT', requests, attempt, attempt) == world, before == attempt
if complete or again or world <= 16 then -- among many ranks, not each looks at all others
  local _, dead = living_ranks(group, consumer, now)
  if #dead > 0 then
    redis.call('HSET', ranks, 'seen:' .. ARGV[3], redis.call('HINCRBY', ranks, 'losses', 1),
      'lost', table.concat(dead, ' '))
    end_attempt(group, 'lost', '', dead)
    forget_ranks(group, dead)
    return {'ended', 'lost', '', dead}
  end
end
if not complete then
  return {'wait', attempt, again and missing_in(group, attempt) or {}}
end
local forming, deadline = string.match(redis.call('HGET', ranks, 'forming') or '', '^(%d+) (%d+)$')
if ARGV[9] == '1' or not forming or forming == ARGV[3] or tonumber(deadline) < now then
  redis.call('HSET', ranks, 'forming', string.format('%s %.0f', ARGV[3], now + FORMING_MS))
  return {'form', attempt}
end
return {'wait', attempt, {}}
