-- Wakes the ranks of a consumer group that wait for one another.
--@include task waiters

local function wake_rank(waiter)
  redis.call('UNLINK', key('wake', waiter)) -- one wake-up is enough, however many steps it did not wait for
  send_wake(waiter)
end

local function wake_ranks(group)
  -- bound: ranks, 4,096 at most (MOST_RANKS)
  for _, consumer in ipairs(redis.call('HVALS', key('ranks', group))) do
    wake_rank(consumer .. '.rank')
  end
end
