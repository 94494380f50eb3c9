-- After groups have arrived: room is made by eviction or expiry, and takes and puts are woken.
--@include task facts pools

-- Make the room that a capacity asks for, and wake the takes and puts that can go on.
local function make_known(producer, count, now)
  local rule = rules()
  if rule.capacity > 0 then -- a capacity that was given later is reached over several puts
    --@include eviction
    -- the cost of a group grows with the consumer groups
    local page = math.max(1, math.floor(PAGE.evicted_beside / (2 + #groups())))
    evict(redis.call('XLEN', stream) - rule.capacity, 0, page + count)
  end
  local queues = {key('queue', '#room')}
  for pool in pairs(entered) do
    queues[#queues + 1], queues[#queues + 2] = key('queue', pool), key('queries', pool)
  end
  if redis.call('EXISTS', unpack(queues)) == 0 then
    return
  end
  --@include clock wake_check
  now = now or now_ms()
  if not wakes_nobody(now) then
    --@include waking waiters
    dequeue('#room', producer)
    wake_room(now)
    wake_entered(now)
  end
end
