-- Lease a full batch, or nothing and queue for it. Payload is then read with
-- XREADGROUP GROUP group slot STREAMS stream 0.
-- KEYS[1] stream
-- ARGV    group, consumer, slot, token, count, least, waiter, ttl_ms, lease_ms
--         token names the lease: a repeated take with the same one finds what it leased
--         least: entries accepted instead of `count`; ttl_ms 0: do not queue, leave the queue
-- Returns {'taken', entries} | {'short', waiting} | {'never', limit} | {'gone'}
--@ _task _waiters _room _groups

begin_writing()
if not exists() then
  return {'gone'}
end
local group, consumer, slot, token = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local count, least, waiter = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local ttl_ms, now = tonumber(ARGV[8]), now_ms()
join(group)
local leased = redis.call('HGET', key('leases', group), slot)
if leased == token then
  return {'taken', #redis.call('XPENDING', stream, group, '-', '+', count, slot)}
end
beat(group, consumer, tonumber(ARGV[9]), now)
-- what an earlier take leased here, and its consumer never heard of, goes back
if leased and not string.find(leased, ' ended', 1, true) then
  return_slot(group, slot, false, consumer)
end
if reclaim(group, now) > 0 then
  wake('#room', room_left(), now)
end

local state = key('group', group)
local limit = number(task, 'limit')
if limit > 0 and least > limit then
  return {'never', limit}
end
local waiting = number(state, 'waiting')
local free = waiting - reserved_before(group, waiter, now)
if free < count then
  if free < least then
    if ttl_ms > 0 then
      enqueue(group, waiter, count, ttl_ms, now)
    else
      dequeue(group, waiter)
    end
    wake(group, waiting, now)
    return {'short', waiting}
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
local returned
repeat
  returned = redis.call('ZRANGE', ready, 0, math.min(count - claimed, 1000) - 1)
  if #returned > 0 then
    local seqs = {}
    for i, member in ipairs(returned) do
      seqs[i] = tonumber(member)
    end
    redis.call('ZREM', ready, unpack(returned))
    claim(seqs)
  end
until #returned == 0 or claimed == count

local cursor, last = number(state, 'cursor'), number(task, 'last')
while claimed < count and cursor < last do
  local upto = math.min(cursor + math.min(count - claimed, 1000), last)
  local seqs = {}
  for seq = cursor + 1, upto do
    seqs[seq - cursor] = seq
  end
  claim(seqs)
  cursor = upto
end
redis.call('HSET', state, 'cursor', string.format('%.0f', cursor))
redis.call('HSET', key('leases', group), slot, token)
add(state, 'waiting', -count)
-- entries that someone deleted behind our back
add(state, 'evicted', count - claimed)
dequeue(group, waiter)
wake(group, waiting - count, now)
return {'taken', claimed}
