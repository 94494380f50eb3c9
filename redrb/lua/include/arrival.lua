-- After groups have arrived: takes and puts that can go on are woken.
--@include task pools

-- Wake the takes and puts that can go on, now that a producer's groups have arrived.
local function make_known(producer, now)
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
