-- A rank asks for its part of a step. There is one when all ranks have asked for the step; one of
-- them is then told to form it: it leases the batch with `take`, and deals it with `ranks_assign`.
-- Payload is read with XREADGROUP GROUP group ranks/<step>.<rank> STREAMS stream 0.
-- KEYS[1] stream
-- ARGV    group, consumer, rank, world, step, spec, attempt, joined, last, lease_ms, most
--         spec: what is asked for, its first word the number of groups; all ranks ask for the same
--         attempt: the one in which it asked before, or 0; joined: 1 when the consumer has been this
--         rank, 0: it starts, and has done all steps before this one; last: 1 when its time is up
--         most: steps that may be formed and not acknowledged
-- Returns {'part', {seq ...}, weights} | {'form', attempt} | {'wait', attempt, {rank to ask ...}}
--       | {'ended', why, told, {rank ...}}: no rank gets a part in this attempt
--       | {'done', next step} | {'early', next step} | {'unacked', first step}
--       | {'differs', spec of the others} | {'replaced'} | {'held', world, {rank that lives ...}}
--       | {'leased', entries leased by others} | {'gone'} | {'more'}: the same again
--@include task index room waiters leases ranks attempts membership steps

begin_writing()
local group, me, rank, world = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local step, spec, before, now = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7]), now_ms()
local crew, parts = key('crew', group), key('parts', group)
if not exists() then
  return {'gone'}
elseif not join(group) then
  return {'more'}
end
if beat(group, me, tonumber(ARGV[10]), now) > 0 then
  wake('#room', room_left(), now)
end

-- a crew of another size, or that was to take other batches, ends when nobody of it lives
local function amount(text)
  return string.match(text, '^%S+')
end
local state, none = numbers(crew, 'world', 'first', 'formed')
local formed_as = not none and redis.call('HGET', parts, ARGV[5])
if not none and (state[1] ~= world or formed_as and amount(formed_as) ~= amount(spec)) then
  local living = look_round(group, me, now)
  if #living > 0 then
    return {'held', state[1], living}
  end
  dissolve(group)
  none = true
end
if none then
  local leased = redis.call('XPENDING', stream, group)[1]
  if leased > 0 then
    return {'leased', leased}
  end
  redis.call('HSET', crew, 'world', ARGV[4], 'first', ARGV[5], 'attempt', '1',
    'formed', string.format('%.0f', step - 1))
  redis.call('ZADD', key('consumers', group), '+inf', CREW)
  state = {world, step, step - 1}
end
local holder = redis.call('HGET', crew, 'holder:' .. ARGV[3])
if holder ~= me then
  if holder and ARGV[8] == '1' then
    return {'replaced'}
  end
  redis.call('HSET', crew, 'holder:' .. ARGV[3], me, 'told:' .. ARGV[3], number(crew, 'losses'))
  local _, dead = look_round(group, me, now)
  forget_ranks(group, dead) -- most likely all are starting again
  if ARGV[8] == '0' and step <= state[3] + 1 then -- it starts at this step: its checkpoint has those before
    for earlier = state[2], math.min(step - 1, state[3]) do
      mark_acked(group, earlier, rank, '0')
    end
    wake('#room', room_left(), now)
  end
end
local known = numbers(crew, 'first', 'formed')
local first, formed = known[1], known[2]

-- a step that is formed already
if step < first or step <= formed and redis.call('HEXISTS', parts, ARGV[5]) == 0 then
  return {'done', first}
elseif step <= formed then
  local name = part_of(step, rank)
  local given = redis.call('HGET', parts, name .. ':given')
  local elsewhere = given and given ~= me and is_given(group, step, (look_round(group, me, now)))
  if not given or given == me or not fail_part(group, step, rank, me) then
    local seqs = words(redis.call('HGET', parts, name))
    if #seqs > 0 then -- else all of it was rejected, and it is done
      redis.call('HSET', parts, name .. ':given', me)
      redis.call('HDEL', parts, name .. ':acked')
    end
    return {'part', seqs, redis.call('HGET', parts, name .. ':weights') or ''}
  end
  wake('#room', room_left(), now)
  if elsewhere then -- those ranks learn it when they acknowledge
    return {'ended', 'anew', '', {}}
  end
elseif step > formed + 1 then
  return {'early', formed + 1}
elseif step >= first + tonumber(ARGV[11]) then
  return {'unacked', first}
end

-- the next one: all have to ask for it
local attempt = number(crew, 'attempt')
local late = lost_before(group, rank)
if before > 0 and before <= number(crew, 'ended') then
  local how = redis.call('HMGET', crew, 'why', 'told', 'lost')
  return {'ended', how[1], how[2], words(how[3])}
end
if #late > 0 then
  return {'ended', 'lost', '', late}
end
local asks = key('asks', group)
local at, theirs = string.match(redis.call('HGET', crew, 'spec') or '', '^(%d+) (.*)$')
if tonumber(at or '0') == attempt and theirs ~= spec then
  for _, other in ipairs((look_round(group, me, now))) do
    if tonumber(redis.call('ZSCORE', asks, other) or '0') == attempt then
      return {'differs', theirs}
    end
  end
  redis.call('DEL', asks) -- nobody who asked for that lives
end
redis.call('HSET', crew, 'spec', string.format('%.0f %s', attempt, spec))
redis.call('ZADD', asks, attempt, rank)
local complete, again = redis.call('ZCOUNT', asks, attempt, attempt) == world, before == attempt
if complete or again or world <= 16 then -- of many ranks not each looks at all
  local _, dead = look_round(group, me, now)
  if #dead > 0 then
    redis.call('HSET', crew, 'told:' .. ARGV[3], redis.call('HINCRBY', crew, 'losses', 1),
      'gone', table.concat(dead, ' '))
    end_attempt(group, 'lost', '', dead)
    forget_ranks(group, dead)
    return {'ended', 'lost', '', dead}
  end
end
if not complete then
  return {'wait', attempt, again and missing_in(group, attempt) or {}}
end
local former, deadline = string.match(redis.call('HGET', crew, 'former') or '', '^(%d+) (%d+)$')
if ARGV[9] == '1' or not former or former == ARGV[3] or tonumber(deadline) < now then
  redis.call('HSET', crew, 'former', string.format('%s %.0f', ARGV[3], now + 3000))
  return {'form', attempt}
end
return {'wait', attempt, {}}
