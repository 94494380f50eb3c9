-- Lease a full batch, or nothing and queue for it. Payload is then read with
-- XREADGROUP GROUP group slot STREAMS stream 0.
-- KEYS[1] stream
-- ARGV    group, consumer, slot, token, count, least, waiter, ttl_ms, lease_ms
--         token names the lease: a repeated take with the same one finds what it leased
--         least: entries accepted instead of `count`; ttl_ms 0: do not queue, leave the queue
-- Returns {'taken', entries} | {'short', waiting, producers that wait for room} | {'never', limit} | {'gone'}
--@ _task _waiters _room _groups

begin_writing()
local known, gone = numbers(task, 'last', 'limit')
if gone then
  return {'gone'}
end
local last, limit = known[1], known[2]
local group, consumer, slot, token = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local count, least, waiter = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local ttl_ms, now = tonumber(ARGV[8]), now_ms()
local state = key('group', group)
local counters, new = numbers(state, 'cursor', 'waiting')
if new then
  join(group)
  counters = numbers(state, 'cursor', 'waiting')
end
local leased = redis.call('HGET', key('leases', group), slot)
if leased == token then
  return {'taken', #redis.call('XPENDING', stream, group, '-', '+', count, slot)}
end
local taken_over = beat(group, consumer, tonumber(ARGV[9]), now)
-- what an earlier take leased here, and its consumer never heard of, goes back
local returned = 0
if leased and not string.find(leased, ' ended', 1, true) then
  returned = return_slot(group, slot, false, consumer)
end
if taken_over > 0 then
  wake('#room', room_left(), now)
end
if returned + taken_over > 0 then
  counters = numbers(state, 'cursor', 'waiting')
end
local cursor, waiting = counters[1], counters[2]
if limit > 0 and least > limit then
  return {'never', limit}
end
local queued = redis.call('EXISTS', key('queue', group)) == 1
local free = queued and waiting - reserved_before(group, waiter, now) or waiting
if free < count then
  if free < least then
    if ttl_ms > 0 then
      enqueue(group, waiter, count, ttl_ms, now)
    else
      dequeue(group, waiter)
    end
    wake(group, waiting, now)
    return {'short', waiting, redis.call('ZCARD', key('queue', '#room'))}
  end
  count = free
end

local claimed = 0
local function claim(seqs)
  if #seqs > 0 then
    local command = {'XCLAIM', stream, group, slot, 0}
    for i, seq in ipairs(seqs) do
      command[5 + i] = id_of(seq)
    end
    command[6 + #seqs] = 'FORCE'
    command[7 + #seqs] = 'JUSTID'
    claimed = claimed + #redis.call(unpack(command))
  end
end

-- what came back is older than what was never delivered
local ready = key('ready', group)
local back
repeat
  back = redis.call('ZRANGE', ready, 0, math.min(count - claimed, 1000) - 1)
  if #back > 0 then
    local seqs = {}
    for i, member in ipairs(back) do
      seqs[i] = tonumber(member)
    end
    redis.call('ZREM', ready, unpack(back))
    claim(seqs)
  end
until #back == 0 or claimed == count

while claimed < count and cursor < last do
  local upto = math.min(cursor + math.min(count - claimed, 1000), last)
  local seqs = {}
  for seq = cursor + 1, upto do
    seqs[seq - cursor] = seq
  end
  claim(seqs)
  cursor = upto
end
redis.call('HSET', state, 'cursor', string.format('%.0f', cursor),
  'waiting', string.format('%.0f', waiting - count))
redis.call('HSET', key('leases', group), slot, token)
-- entries that someone deleted behind our back
add(state, 'evicted', count - claimed)
if queued then
  dequeue(group, waiter)
  wake(group, waiting - count, now)
end
return {'taken', claimed}
