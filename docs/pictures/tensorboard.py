"""`python3 tensorboard.py ADDRESS PICTURE`: TensorBoard at that address, as Chromium shows it (python3-selenium).

`chromium --screenshot` alone is too early: TensorBoard draws a chart when it has come into view.
"""

from __future__ import annotations

import sys
import time

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

PAGE = "/?darkMode=false&smoothing=0&tagFilter=Loss/(train_step|validation)#timeseries"
CHARTS, RUNS = 2, 3
LONGEST, DRAWING = 60, 2  # seconds
# A row of the table below each chart: its data are there.
ROWS = "scalar-card-data-table tb-data-table-content-row"
SETTINGS = "metrics-dashboard-settings"


def main() -> None:
    address, picture = sys.argv[1], sys.argv[2]
    options = webdriver.ChromeOptions()
    options.add_argument("--headless=new")
    options.add_argument("--no-sandbox")  # Chromium refuses to work for root with it; the page is our own
    options.add_argument("--disable-gpu")
    options.add_argument("--hide-scrollbars")
    options.add_argument("--window-size=1280,760")
    browser = webdriver.Chrome(service=Service("/usr/bin/chromedriver"), options=options)
    try:
        browser.get(address + PAGE)
        wait = WebDriverWait(browser, LONGEST)
        # The column with the settings takes the charts' place.
        wait.until(lambda page: page.find_elements(By.CSS_SELECTOR, SETTINGS))
        browser.find_element(By.XPATH, "//button[contains(., 'Settings')]").click()
        wait.until(lambda page: not page.find_elements(By.CSS_SELECTOR, SETTINGS))
        wait.until(lambda page: len(page.find_elements(By.CSS_SELECTOR, ROWS)) >= CHARTS * RUNS)
        time.sleep(DRAWING)
        browser.save_screenshot(picture)
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
